#!/usr/bin/env bash
# Tests the package with dependency versions other than those in constraints.txt: the newest that pyproject.toml admits and
# the registry has today, as `pip install` selects them, with the newest Python found; or the lowest that pyproject.toml
# admits, with the Python of .venv.
#
#     tools/test_dependencies.sh newest|lowest [PYTEST-ARGUMENT...]
#
# Needs uv from .venv. The environment stays under .tools/dependencies, beside a list of its versions, and is made anew each time.
# The wheel is built and installed, as for a user. Without pytest arguments it runs the tests that depend most on other
# packages: start, every protocol over both front ends, every format, training, the clients and the commands.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:-}

newest_python() { # on PATH, or one that pyenv has installed
  local version each
  for version in 3.13 3.12 3.11; do
    for each in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
      "$each" -c "import venv" 2> /dev/null || continue
      command -v "$each"
      return
    done
  done
}

case $which in
  newest) resolution=highest python=$(newest_python) ;;
  lowest) resolution=lowest-direct python=$PWD/.venv/bin/python ;;
  *) echo "there are no $which versions; give newest or lowest" >&2; exit 2 ;;
esac
shift
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(
  tests/wire
  tests/checkpoints/test_formats.py
  tests/checkpoints/test_keras_signature.py
  tests/compat
  tests/cli/test_client_commands.py
  tests/cli/test_evaluations.py
  tests/cli/test_health.py
  tests/cli/test_predict.py
  tests/cli/test_serve.py
  tests/clients/test_client.py
  tests/clients/test_retries.py
  tests/clients/test_predict_many.py
  tests/clients/test_evaluating.py
  tests/clients/test_watching.py
  tests/clients/test_async_client.py
  tests/clients/test_channels.py
  tests/integration/test_calls.py
  tests/integration/test_foreign_checkpoints.py
  tests/integration/test_tls.py
  tests/protocols/test_services.py
  tests/service/calls/test_around_calls.py
  tests/service/test_grown_descriptors.py
  tests/service/handlers/test_health.py
  tests/service/test_http.py
  tests/service/test_evaluator_metrics.py
  tests/service/handlers/test_inference_tensors.py
  tests/service/handlers/test_tf_tensors.py
  tests/trainer/test_training.py::test_one_device_gives_what_fit_gives
  tests/trainer/test_training.py::test_replicas_give_the_weights_of_one_device
  tests/trainer/test_training.py::test_tensorboard_reads_the_scalars
)

source tools/uv_index.sh

folder=.tools/dependencies/$which
echo "Installing the $which versions into $folder, with $("$python" --version)"
# Versions are found and installed by one program: a mirror's answers may differ from one request to the next.
install() {
  "$uv" venv --quiet --clear --python "$python" "$folder"
  "$uv" pip install --quiet --python "$folder" --resolution "$resolution" --prerelease if-necessary \
    --reinstall-package understudy '.[server,fast,otel,examples,gpu,dev]'
}
install || { echo "so it is tried once more" >&2; install; }
"$uv" pip freeze --quiet --python "$folder" > "$folder.txt"
"$uv" pip check --quiet --python "$folder"
# The lowest versions leave sockets of event loops to the garbage collector, which may close them during any test.
lenient=()
[ "$which" = newest ] || lenient=(-W ignore::ResourceWarning)
exec "$folder/bin/python" -m pytest "${lenient[@]}" -n 3 --dist loadfile --no-loadscope-reorder "${tests[@]}"
