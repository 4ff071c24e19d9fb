"""tinker-cookbook 0.6.1: arguments of a tool call lose their letters. `python tinker_arguments.py TOKENIZER`, of a Qwen model

Its Qwen3 renderer writes arguments with `json.dumps`, which escapes what is not ASCII; the model's template does not, so that
a model is trained on other tokens than it is asked with.
"""

import json
import sys

from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.third_party.openai_compat import openai_messages_to_tinker
from transformers import AutoTokenizer

arguments = json.dumps({"city": "São Paulo"}, ensure_ascii=False)
call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
hf = AutoTokenizer.from_pretrained(sys.argv[1])
example, _ = get_renderer("qwen3", hf).build_supervised_example(openai_messages_to_tinker(messages))
call["function"]["arguments"] = json.loads(arguments)
print("it:      ", hf.decode(example.to_ints()).splitlines()[-2])
print("template:", hf.apply_chat_template(messages, tokenize=False).splitlines()[-2])
