"""litellm: two turns, the second one streamed."""

import sys

import litellm

url, key, model = sys.argv[1:]
server = {"model": f"openai/{model}", "api_base": url, "api_key": key, "max_tokens": 32}
messages = [{"role": "user", "content": "Name three seas."}]
first = litellm.completion(messages=messages, **server)
messages += [
    {"role": "assistant", "content": first.choices[0].message.content},
    {"role": "user", "content": "And one ocean?"},
]
pieces = list(
    litellm.completion(
        messages=messages, stream=True, stream_options={"include_usage": True}, **server
    )
)
whole = litellm.stream_chunk_builder(pieces, messages=messages)
print(whole.choices[0].message.content)
print("cached:", whole.usage.prompt_tokens_details.cached_tokens)
assert whole.usage.prompt_tokens_details.cached_tokens > 0
