"""Chat templates for tests of detection: the parts about tools and reasoning of public models' templates.

Each is shortened, and written from the public format of the models that its comment names.
"""

from __future__ import annotations

from typing import Final

# Qwen2.5, Qwen3 (Apache-2.0): Hermes' format; enable_thinking and the empty block are of Qwen3.
QWEN3: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\\n" }}
{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{%- set content = message.content %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.last or reasoning_content %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content }}
{%- endif %}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
{%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Qwen3-Coder (Apache-2.0).
QWEN3_CODER: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou have access to the following functions:\\n\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n</function>' }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for args_name, args_value in tool_call.arguments | items %}
{{- '<parameter=' + args_name + '>\\n' }}
{%- set value = args_value | string if args_value is string else args_value | tojson %}
{{- value }}{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Llama 3.1 and 3.2 (Llama Community License): one call per message.
LLAMA31: Final = """\
{{- bos_token }}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n<|eot_id|>" }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{%- if tools is not none and loop.first %}
{{- "<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a JSON" }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{{- message.content + "<|eot_id|>" }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{{- '{"name": "' + tool_call.name + '", ' }}
{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
{{- "<|eot_id|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Mistral 7B Instruct v0.3 (Apache-2.0).
MISTRAL: Final = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and loop.last or tools is not none and loop.first %}
{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "][/AVAILABLE_TOOLS]" }}
{%- endif %}
{{- "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}
{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message["role"] == "assistant" %}
{{- " " + message["content"] + eos_token }}
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
{%- endif %}
{%- endfor %}
"""

# DeepSeek V3 and R1 (MIT): arguments are text.
DEEPSEEK_R1: Final = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}
{{- '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}
{%- if not loop.first %}{{ '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

# gpt-oss (Apache-2.0): harmony.
GPT_OSS: Final = """\
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") }}
{{- "\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- if tools %}
{{- "<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n" }}
{%- for tool in tools %}{{- "type " + tool.function.name + " = (_: any) => any;\\n" }}{%- endfor %}
{{- "}<|end|>" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- set tool_call = message.tool_calls[0].function %}
{%- if message.content %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
{%- else %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
{%- endif %}
{%- else %}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

# GLM-4.5 (MIT).
GLM45: Final = """\
[gMASK]<sop>
{%- if tools %}{{- '<|system|>\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\\n<think></think>' }}
{%- if m.content %}{{- '\\n' + m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}
{%- set tc = tc.function %}
{{- '\\n<tool_call>' + tc.name + '\\n' }}
{%- for k, v in tc.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}
{%- endif %}
"""

# Kimi K2 (modified MIT).
KIMI_K2: Final = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + message.content }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for tool_call in message.tool_calls %}
{%- set name = 'functions.' + tool_call.function.name + ':' + loop.index0 | string %}
{{- '<|tool_call_begin|>' + name + '<|tool_call_argument_begin|>' }}
{%- if tool_call.function.arguments is string %}{{ tool_call.function.arguments }}
{%- else %}{{ tool_call.function.arguments | tojson }}{% endif %}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- else %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}
"""

# Kimi K2 Thinking and K2.5, rewritten: macros, a namespace, a loop that breaks; a call has its id and no name.
KIMI_K2_IDS: Final = """\
{%- macro content_of(message) -%}
{%- set c = message.get('content') -%}
{%- if c is string -%}{{ c }}
{%- elif c is not none -%}{% for part in c -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro role_of(message) -%}
{%- set name = message.get('name') or message['role'] -%}
{%- if message['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
{%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>
{%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
{%- endmacro -%}
{%- macro calls_of(message) -%}
<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
{%- else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for index in range(messages | length - 1, -1, -1) -%}
{%- if messages[index]['role'] == 'assistant' and not messages[index].get('tool_calls') -%}
{%- set ns.last = index -%}{%- break -%}
{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
<|im_end|>{%- endif -%}
{%- for message in messages -%}
{{ role_of(message) }}
{%- if message['role'] == 'assistant' -%}
<think>{{ message.get('reasoning_content', '') if loop.index0 > ns.last else '' }}</think>{{ content_of(message) }}
{%- if message.get('tool_calls') -%}{{ calls_of(message) }}{%- endif -%}
{%- elif message['role'] == 'tool' -%}
{{ '## Return of ' + message.tool_call_id + '\\n' }}{{ content_of(message) }}
{%- elif message['content'] is not none -%}{{ content_of(message) }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

# SmolLM2 Instruct (Apache-2.0), the default model: no tools.
SMOLLM2: Final = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Gemma 4 (Apache-2.0): strings between quote tokens, keys without quotes.
GEMMA4: Final = """\
{%- macro value(v) -%}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is mapping %}{{ '{' }}
{%- for k in v %}{{ k }}:{{ value(v[k]) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is sequence %}[{% for i in v %}{{ value(i) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v }}{% endif %}
{%- endmacro -%}
{{- bos_token }}
{%- if tools or enable_thinking %}{{ '<|turn>system\\n' }}{{ '<|think|>\\n' if enable_thinking }}
{%- for tool in tools or [] %}{{ '<|tool>declaration:' + tool.function.name + '{}<tool|>' }}{% endfor %}
{{- '<turn|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for k, v in call.function.arguments.items() %}{{ k }}:{{ value(v) }}{{ ',' if not loop.last }}{% endfor %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- m.content.split('<channel|>')[-1] + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

# LFM2 (LFM Open License): shows tools, and nothing of earlier calls.
LFM2: Final = """\
{{- bos_token }}{{ '<|im_start|>system\\nList of tools: <|tool_list_start|>[' }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ ']<|tool_list_end|><|im_end|>\\n' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Seed-OSS (Apache-2.0).
SEED_OSS: Final = """\
{{- bos_token }}system\n{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ eos_token }}
{%- for m in messages %}
{{- bos_token + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<parameter=' + k + '>' + (v if v is string else v | tojson) + '</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</seed:tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"""

# DeepSeek V4 (MIT): DSML with the section `tool_calls`.
DEEPSEEK_V4: Final = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<｜Assistant｜></think>' + m.content }}
{%- if m.tool_calls %}
{{- '\\n\\n<｜DSML｜tool_calls>\\n' }}
{%- for call in m.tool_calls %}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- (v if v is string else v | tojson) + '</｜DSML｜parameter>\\n' }}
{%- endfor %}
{{- '</｜DSML｜invoke>\\n' }}
{%- endfor %}
{{- '</｜DSML｜tool_calls>' }}
{%- endif %}
{{- eos_token }}
{%- else %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' if thinking else '<｜Assistant｜></think>' }}{% endif %}"""

# Granite 3.3 (Apache-2.0): names the marker of calls in its system text, and shows nothing of earlier calls.
GRANITE33: Final = """\
{{- '<|start_of_role|>system<|end_of_role|>You are Granite.' }}
{%- if tools %}{{ " When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used." }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- if thinking %}{{ ' Write your thoughts between <think></think> and your response between <response></response>.' }}
{%- endif %}{{ '<|end_of_text|>\\n' }}
{%- for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

# Command A (CC-BY-NC): a list of actions; text next to them is a plan.
COMMAND_A: Final = """\
{{- bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- if m.content %}{{ '<|START_THINKING|>' + m.content + '<|END_THINKING|>' }}{% endif %}
{{- '<|START_ACTION|>[\\n' }}
{%- for call in m.tool_calls %}
{{- '    {"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}{{ ',\\n' if not loop.last }}
{%- endfor %}
{{- '\\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}
{%- else %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- if not reasoning %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}{% endif %}"""

# Apertus (Apache-2.0): the name of the tool is the key of its arguments.
APERTUS: Final = """\
{{- bos_token }}<|developer_start|>{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<|developer_end|>
{%- for m in messages %}
{{- '<|' + m.role + '_start|>' }}
{%- if m.reasoning_content %}{{ '<|inner_prefix|>' + m.reasoning_content + '<|inner_suffix|>' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '<|tools_prefix|>[' }}
{%- for call in m.tool_calls %}
{{- '{"' + call.function.name + '": ' }}{{ call.function.arguments | tojson }}{{ '}' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']<|tools_suffix|>' }}
{%- endif %}
{{- '<|' + m.role + '_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"""

# Apriel 1.5 (MIT): always reasons.
APRIEL: Final = """\
{{- '<|begin_system|>\\nEnd your thoughts with [BEGIN FINAL RESPONSE].' }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{{- '\\n<|begin_' + m.role + '|>\\n' + m.content }}
{%- if m.tool_calls %}
{{- '\\n<tool_calls>[' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']</tool_calls>' }}
{%- endif %}
{{- '\\n<|end|>' if m.role == 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n<|begin_assistant|>\\nHere are my reasoning steps:\\n' }}{% endif %}"""
