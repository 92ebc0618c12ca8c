"""Chat templates of our own with the structure of released ones, and conversations for them."""

from __future__ import annotations

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOOLS_FIRST = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
CALLS = (
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '\n<tool_call>\n' + call['function'] | tojson + '\n</tool_call>' }}{% endfor %}"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# ChatML with tools, as Qwen2.5.
CHATML_TOOLS = (
    TOOLS_FIRST + "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if m['role'] == 'assistant' %}" + CALLS + "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
# As Qwen3: earlier turns lose their reasoning; the last one gets an empty one if it has none.
REWRITES_HISTORY = (
    TOOLS_FIRST
    + LAST_QUESTION
    + "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' }}"
    "{% endif %}{{ m['content'] or '' }}" + CALLS + "{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
# As Llama 3.1: a header, and another end of a turn with a call.
HEADERS = (
    "{{ '<|begin|>' }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|start_header|>' + m['role'] + '<|end_header|>\n\n' }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function'] | tojson + '<|eom|>' }}"
    "{% else %}{{ m['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
# As Gemma: the assistant has another name, and no system role.
RENAMED = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + "
    "'<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)
# As Mistral: no generation prompt, tools before the last question.
NO_PROMPT = (
    LAST_QUESTION + "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% elif m['tool_calls'] %}{{ '[CALLS] ' + m['tool_calls'] | tojson + '</s>' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
    "{% elif m['role'] == 'tool' %}{{ '[RESULTS] {\"content\": ' + m['content'] + '}[/RESULTS]' }}"
    "{% endif %}{% endfor %}"
)
# As Cohere: two tokens close an answer, and generation stops at the second one.
TWO_ENDS = (
    "{% for m in messages %}{{ '<turn>' + ('<bot>' if m['role'] == 'assistant' else '<user>') }}"
    "{{ ('<answer>' + m['content'] + '</answer>') if m['role'] == 'assistant' else m['content'] }}"
    "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn><bot>' }}{% endif %}"
)
# As Gemma with tools: nothing ends a turn between a call and its result.
OPEN_CALL = CHATML_TOOLS.replace(
    "{{ '<|im_end|>\n' }}{% endfor %}",
    "{% if not m['tool_calls'] %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}",
)
DROPS_CALLS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
MARKED = (
    TOOLS_FIRST + "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ '<think></think>' + (m['content'] or '') }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
)
CONTROLS = {  # the first one is EOS
    CHATML_TOOLS: ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"),
    REWRITES_HISTORY: ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"),
    HEADERS: ("<|eot|>", "<|eom|>", "<|begin|>", "<|start_header|>", "<|end_header|>"),
    RENAMED: ("<eos>", "<start>", "<end>"),
    NO_PROMPT: ("</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULTS]", "[/RESULTS]"),
    TWO_ENDS: ("<end>", "<turn>", "<bot>", "<user>", "<answer>", "</answer>"),
}
CHATML_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text, number=1):
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number}", "content": text}


def call(number=1, **arguments):
    return {"type": "function", "id": f"call{number}", "function": {"name": "add", "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
PLAIN = [user("Hello"), said("Hi there."), user("2+2?"), said("4.")]
REPEATED = [user("yes"), said("yes"), user("yes"), said("yes")]
THINK = [user("Hello"), said("Hi.", reasoning_content="They greet."), user("2+2?")]
THINK += [said("4.", reasoning_content="Easy.")]
INLINE = [user("Hello"), said("<think>\nThey greet.\n</think>\n\nHi."), user("2+2?")]
INLINE += [said("<think>\nEasy.\n</think>\n\n4.")]
ONE_CALL = [user("2+3?"), said(None, tool_calls=[call(a=2)]), result("5"), said("It is 5.")]
ROUNDS = [user("2+3?"), said("I add.", tool_calls=[call(a=2)]), result("5")]
ROUNDS += [said("", tool_calls=[call(2, a=5)]), result("11", 2), said("5, 11."), user("Thanks"), said("Bye.")]
TWO_CALLS = [user("2+3, 5+6?"), said("", tool_calls=[call(a=2), call(2, a=5)]), result("5")]
TWO_CALLS += [result("11", 2), said("5 and 11.")]
