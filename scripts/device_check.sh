#!/usr/bin/env bash
# Checks the package on a GPU machine with the packages found there: correctness, bytes against the declared budget, and
# a short benchmark. Writes one JSON file. About ten minutes; nothing is downloaded.
#
#   bash scripts/device_check.sh OUT.json [PYTHON]
#
# Exit status 0 if every check passed. Needs JAX with a GPU backend, flax, orbax-checkpoint, tensorstore; what else the
# package needs is installed into a virtual environment that sees the machine's packages, if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:?give the JSON file to write}
python=${2:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! PYTHONPATH=. "$python" -c 'import flashmoe_jax.generate, xxhash, jinja2, rich, tokenizers' 2>/dev/null; then
  "$python" -m venv --system-site-packages "$work/venv"
  python=$work/venv/bin/python
  "$python" -m pip install --quiet --no-deps ml-dtypes safetensors tokenizers jinja2 markupsafe rich markdown-it-py \
    mdurl pygments xxhash filelock platformdirs psutil
fi
PYTHONPATH=. "$python" scripts/device_check.py --work "$work" --out "$out"
