# llm: two turns of one conversation. Arguments: URL KEY MODEL.
set -eu
LLM_USER_PATH=$(mktemp -d "$HOME/llm.XXXXXX")
export LLM_USER_PATH
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- model_id: kvring
  model_name: $3
  api_base: $1
YAML
llm -m kvring --key "$2" -o max_tokens 32 "Name three mountains."
llm -c --key "$2" -o max_tokens 32 "And the highest one?"
