# To be sourced: sets uv to the program in .venv, and has it use the index that pip is configured with.
uv=$PWD/.venv/bin/uv
index=$("$PWD/.venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
export UV_PYTHON_DOWNLOADS=never
