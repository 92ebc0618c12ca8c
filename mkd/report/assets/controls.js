// Connect the controls above the curves.
(() => {
  "use strict";
  const { data, state, draw, zoom, resize, element, axes } = charts;
  const find = (id) => document.getElementById(id), root = document.documentElement;
  for (const id of ["controls", "hint"]) find(id).hidden = false;

  if (data.runs.length > 1) {
    data.runs.forEach((name, run) => {
      const button = element("button", { type: "button", class: `run-${run % 8}`, "aria-pressed": "true" });
      button.append(element("span", { class: "swatch" }), ` ${name}`);
      button.addEventListener("click", () => {
        if (!state.runs.delete(run)) state.runs.add(run);
        button.setAttribute("aria-pressed", String(state.runs.has(run)));
        draw();
      });
      find("run-toggles").append(button);
    });
  }
  find("axis").closest("label").hidden = !axes.has("consumed_tokens");
  find("marks").closest("label").hidden = !data.marks.length;
  find("marks-hint").hidden = !data.marks.length;
  find("axis").addEventListener("change", (event) => {
    state.axis = event.target.value;
    state.range = null;
    draw();
  });
  find("smoothing").addEventListener("input", (event) => {
    state.smoothing = Number(event.target.value);
    find("smoothing-value").textContent = event.target.value;
    draw();
  });
  for (const name of ["log", "marks"]) {
    find(name).addEventListener("change", (event) => {
      state[name] = event.target.checked;
      draw();
    });
  }
  find("reset").addEventListener("click", () => zoom(null));
  find("metric-menu").addEventListener("change", (event) => {
    const { key } = event.target.dataset;
    if (event.target.checked) state.keys.add(key);
    else state.keys.delete(key);
    draw();
  });
  find("metric-menu").addEventListener("keydown", (event) => {
    if (event.key === "Escape") find("metric-menu").open = false;
  });

  function setTheme(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    draw();
  }
  find("theme").addEventListener("change", (event) => setTheme(event.target.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => setTheme("light"));
  addEventListener("afterprint", () => setTheme(find("theme").value));
  new ResizeObserver(resize).observe(find("plots"));
  draw();
})();
