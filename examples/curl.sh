#!/bin/sh
# The API with curl: sh curl.sh [URL]. With a key: ENGINE_API_KEY=... sh curl.sh
set -eu
url=${1:-http://127.0.0.1:30000}
ask() {
    curl --silent --show-error --fail-with-body --no-buffer --max-time 60 \
        --header "Authorization: Bearer ${ENGINE_API_KEY:--}" --header 'Content-Type: application/json' "$@"
    echo
}

echo '# What is served'
ask "$url/v1/models"

echo '# A chat'
ask "$url/v1/chat/completions" --data '{"max_tokens": 16, "messages": [{"role": "user", "content": "Hello!"}]}'

echo '# The same, streamed'
ask "$url/v1/chat/completions" --data '{"max_tokens": 16, "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'

echo '# JSON'
ask "$url/v1/chat/completions" --data '{"max_tokens": 64, "messages": [{"role": "user", "content": "A color?"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "color", "schema": {"type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}}, "required": ["color"], "additionalProperties": false}}}}'

echo '# Tokens of a text'
ask "$url/tokenize" --data '{"prompt": "Hello!"}'
