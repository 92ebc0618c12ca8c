// Draw the curves: one uPlot per metric, with one zoom and one cursor for all of them.
const charts = (() => {
  "use strict";
  const RUN_COLOURS = 8, HEIGHT = 230, HELD_OUT_DASHES = [[6, 4], [2, 3], [10, 3, 2, 3]];
  const MARK_SIGNS = { "loss spike": "\u25b2", "skipped step": "\u2715", failed: "\u2716" };
  const data = JSON.parse(document.getElementById("data").textContent);
  const heldOut = [...new Set(data.splits.map((one) => one.split))].filter((name) => name !== "train");
  const state = {
    axis: "iteration", smoothing: 0, log: false, marks: true, range: null,
    runs: new Set(data.runs.keys()),
    keys: new Set(data.panels.filter((panel) => panel.shown).map((panel) => panel.key)),
  };
  let drawn = [];

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (run) => style(`--run-${run % RUN_COLOURS}`);
  const translucent = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function format(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 9 : 5 });
  }

  // Exponential moving average without the bias of its start; gaps stay gaps.
  function smoothed(values, share) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + (1 - share);
      return sum / weight;
    });
  }

  // Return the curves of a metric: one per run and split that have it on this axis.
  function curvesOf(key) {
    const usable = (value) => (value != null && (!state.log || value > 0) ? value : null);
    return data.splits
      .filter((one) => state.runs.has(one.run) && key in one.series && state.axis in one.x)
      .map((one) => ({
        run: one.run, split: one.split, x: one.x[state.axis], isHeldOut: one.split !== "train",
        values: one.series[key].map(usable),
        low: one.low && one.low[key].map(usable), high: one.high && one.high[key].map(usable),
      }))
      .filter((curve) => curve.values.some((value) => value != null));
  }

  // Return uPlot's series and columns: per curve its band, its raw line, and its smoothed line.
  function seriesOf(curves) {
    const series = [{}], tables = [], bands = [], shown = [];
    const dashOfRun = (run) => (run >= RUN_COLOURS ? [1, 3] : undefined);
    for (const curve of curves) {
      const stroke = colour(curve.run), columns = [curve.x];
      const add = (values, options) => {
        columns.push(values);
        return series.push({ stroke, width: 1.6, points: { show: false }, ...options }) - 1;
      };
      if (curve.low) {
        const low = add(curve.low, { width: 0 }), high = add(curve.high, { width: 0 });
        bands.push({ series: [high, low], fill: translucent(stroke, 0.18) });
      }
      const isSmooth = state.smoothing > 0 && !curve.isHeldOut;
      if (isSmooth) add(curve.values, { stroke: translucent(stroke, 0.3), width: 1 });
      const values = isSmooth ? smoothed(curve.values, state.smoothing) : curve.values;
      const isDotted = curve.isHeldOut || curve.values.filter((value) => value != null).length < 2;
      const index = add(values, {
        dash: curve.isHeldOut ? HELD_OUT_DASHES[heldOut.indexOf(curve.split) % 3] : dashOfRun(curve.run),
        points: { show: isDotted, size: 6, fill: stroke },
      });
      shown.push({ ...curve, index });
      tables.push(columns);
    }
    return { series, bands, shown, columns: uPlot.join(tables) };
  }

  // Return the x of an iteration of a run, by interpolation on another axis.
  function xOf(run, iteration) {
    if (state.axis === "iteration") return iteration;
    const x = data.splits.find((one) => one.run === run && state.axis in one.x)?.x;
    if (!x) return null;
    let after = x.iteration.findIndex((one) => one >= iteration);
    if (after < 0) after = x.iteration.length - 1;
    const before = Math.max(0, after - 1), span = x.iteration[after] - x.iteration[before];
    const part = span ? (iteration - x.iteration[before]) / span : 0;
    return x[state.axis][before] + part * (x[state.axis][after] - x[state.axis][before]);
  }

  function drawMarks(plot) {
    if (!state.marks) return;
    const { ctx, bbox } = plot, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${10 * ratio}px sans-serif`;
    ctx.textAlign = "center";
    for (const [run, iteration, kind] of data.marks) {
      const x = state.runs.has(run) ? xOf(run, iteration) : null;
      if (x == null || x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const left = plot.valToPos(x, "x", true), bottom = bbox.top + bbox.height;
      ctx.strokeStyle = ctx.fillStyle = colour(run);
      if (kind in MARK_SIGNS) {
        ctx.fillText(MARK_SIGNS[kind], left, bottom - 3 * ratio);
        continue;
      }
      const isSave = kind === "save";
      ctx.globalAlpha = isSave ? 1 : 0.6;
      ctx.setLineDash(isSave ? [] : [4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, isSave ? bottom - 6 * ratio : bbox.top);
      ctx.lineTo(left, bottom);
      ctx.stroke();
      ctx.globalAlpha = 1;
    }
    ctx.restore();
  }

  // Return the place of the value nearest to `place` in a joined column, or -1.
  function nearest(column, place) {
    for (let step = 0; step < column.length; step++) {
      if (column[place - step] != null) return place - step;
      if (column[place + step] != null) return place + step;
    }
    return -1;
  }

  // Show the values at the cursor, or the last ones: a row for each run, a column for each split.
  function readOut(chart) {
    const { plot, shown, readout } = chart, x = plot.data[0], at = plot.cursor.idx;
    const place = at == null ? x.length - 1 : at, axis = state.axis === "iteration" ? "iteration" : "tokens";
    const splits = [...new Set(shown.map((curve) => curve.split))];
    const head = element("tr", {}, element("th", { scope: "col" }, at == null ? "last" : `${axis} ${format(x[place])}`));
    for (const split of splits) {
      head.append(element("th", { scope: "col" }, element("span", { class: split === "train" ? "bar" : "dot" }), ` ${split}`));
    }
    const rows = [...new Set(shown.map((curve) => curve.run))].map((run) => {
      const name = element("th", { scope: "row", class: `run-${run % RUN_COLOURS}` });
      name.append(element("span", { class: "swatch" }), ` ${data.runs[run]}`);
      const row = element("tr", {}, name);
      for (const split of splits) {
        const column = plot.data[shown.find((curve) => curve.run === run && curve.split === split)?.index];
        const found = column ? nearest(column, place) : -1;
        row.append(element("td", {}, found < 0 ? "" : format(column[found])));
      }
      return row;
    });
    readout.replaceChildren(head, ...rows);
  }

  function fullRange() {
    const ends = data.splits
      .filter((one) => state.runs.has(one.run) && state.axis in one.x)
      .flatMap((one) => [one.x[state.axis][0], one.x[state.axis].at(-1)]);
    const low = Math.min(...ends), high = Math.max(...ends);
    return ends.length ? (low === high ? [low - 1, high + 1] : [low, high]) : [0, 1];
  }

  function zoom(range) {
    const full = fullRange();
    state.range = range && range[1] > range[0] ? [Math.max(full[0], range[0]), Math.min(full[1], range[1])] : null;
    for (const { plot } of drawn) {
      const [min, max] = state.range || full;
      plot.setScale("x", { min, max });
    }
  }

  function zoomBy(factor) {
    const [low, high] = state.range || fullRange(), middle = (low + high) / 2, half = ((high - low) / 2) * factor;
    zoom([middle - half, middle + half]);
  }

  function options(series, bands, width, chart) {
    const grid = { stroke: style("--line"), width: 1 };
    const axis = { stroke: style("--faint"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
    const short = (_, values) => values.map((value) => (value == null ? "" : Math.abs(value) >= 1e4
      ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value) : format(value)));
    return {
      width, height: HEIGHT, series, bands, legend: { show: false }, padding: [8, 22, 0, 0],
      scales: { x: { time: false, range: () => state.range || fullRange() }, y: { distr: state.log ? 3 : 1 } },
      axes: [{ ...axis, size: 28, values: short }, { ...axis, size: 58, values: short }],
      cursor: {
        sync: { key: "mkd", scales: ["x", null], filters: { pub: (type) => ["mousemove", "mouseleave", "mouseenter"].includes(type) } },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => { zoom(null); return null; } },
        points: { size: 6 },
      },
      hooks: {
        draw: [drawMarks],
        setCursor: [() => chart.plot && readOut(chart)],
        setSelect: [(plot) => {
          const { left, width: size } = plot.select;
          if (size > 2) zoom([plot.posToVal(left, "x"), plot.posToVal(left + size, "x")]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
  }

  function drawPanel(panel, grid) {
    const box = element("article", { class: "plot", tabindex: "0", role: "group", "aria-label": `curve of ${panel.key}` });
    box.append(element("h4", { title: panel.help }, panel.key, " ", element("small", {}, panel.unit)));
    grid.append(box);
    const curves = curvesOf(panel.key);
    if (!curves.length) {
      box.append(element("p", { class: "empty" }, state.log ? "no positive value" : "no value of the runs shown"));
      return;
    }
    const { series, bands, shown, columns } = seriesOf(curves);
    const chart = { box, shown, readout: element("table", { class: "readout" }), plot: null };
    chart.plot = new uPlot(options(series, bands, box.clientWidth - 20, chart), columns, box);
    box.append(chart.readout);
    box.addEventListener("keydown", (event) => onKey(event, chart));
    drawn.push(chart);
    readOut(chart);
  }

  function onKey(event, chart) {
    const { plot } = chart, x = plot.data[0];
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      const low = plot.scales.x.min, high = plot.scales.x.max;
      let place = plot.cursor.idx == null ? (move > 0 ? -1 : x.length) : plot.cursor.idx;
      do place += move; while (x[place] < low || x[place] > high);
      if (x[place] !== undefined) plot.setCursor({ left: plot.valToPos(x[place], "x"), top: 20 }, true, true);
    } else if (event.key === "+" || event.key === "=") zoomBy(0.5);
    else if (event.key === "-") zoomBy(2);
    else if (event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  }

  function draw() {
    for (const { plot } of drawn) plot.destroy();
    drawn = [];
    const root = document.getElementById("plots"), shown = data.panels.filter((panel) => state.keys.has(panel.key));
    root.replaceChildren();
    for (const panel of shown) drawPanel(panel, root);
  }

  function resize() {
    for (const { plot, box } of drawn) {
      const width = box.clientWidth - 20;
      if (width > 50 && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: HEIGHT });
    }
  }

  return { data, state, draw, zoom, resize, element, axes: new Set(data.splits.flatMap((one) => Object.keys(one.x))), drawn: () => drawn };
})();
