#!/usr/bin/env bash
# Writes requirements/: every package that is installed, with the hashes of its files, for Python 3.11 to 3.13 and all
# platforms. The versions are those of constraints.txt, and the newest for what it does not name. No index is named.
#
#     tools/lock.sh           # after a change of pyproject.toml or constraints.txt
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/uv_index.sh

lock() { # FILE PYTHON ARGUMENT...
  "$uv" pip compile --quiet --universal --python-version "$2" --generate-hashes --no-header --no-annotate --no-emit-index-url \
    --no-emit-find-links --no-strip-extras --constraint constraints.txt --build-constraint constraints.txt \
    --no-emit-package understudy --output-file "requirements/$1.txt" "${@:3}"
}
words() { printf '%s\n' "$@"; }

words "pip==$(sed -n 's/^PIP_VERSION := //p' Makefile)" | lock pip 3.11 -
# What `[build-system] requires` of pyproject.toml names, and what hatchling needs for an editable installation.
sed -n '/^requires = \[/,/^\]/s/^ *"\([^"]*\)".*/\1/p' pyproject.toml | cat - <(words editables) | lock build 3.11 -
lock development 3.11 pyproject.toml --extra server --extra fast --extra otel --extra examples --extra dev
lock docs 3.11.5 pyproject.toml --extra docs # pymdown-extensions needs a patch release
words pip-audit cyclonedx-bom | lock audit 3.11 -
# The image's, with either build of TensorFlow. tensorflow-cpu exists for x86-64 only; elsewhere `tensorflow` has no CUDA.
# tensorflow-serving-api requires `tensorflow` by name everywhere.
tensorflow='>=2.21,<2.22'
image() { lock "image-$1" 3.11 pyproject.toml - --extra server-base --extra examples --extra otel --extra s3 --extra gcs "${@:2}"; }
words "tensorflow-cpu$tensorflow; platform_machine == 'x86_64'" "tensorflow-serving-api$tensorflow" | image cpu
sed -i "s/^tensorflow==[0-9.]*/& ; platform_machine != 'x86_64'/" requirements/image-cpu.txt
words "tensorflow[and-cuda]$tensorflow" "tensorflow-serving-api$tensorflow" | image cuda
# What the image has besides for a cluster. Its other packages have the same versions in all lists, by constraints.txt.
lock cluster-ray 3.11 pyproject.toml --extra ray
