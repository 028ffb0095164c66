#!/usr/bin/env bash
# Runs a command with this checkout as the package cute_grouped_mlp, without installing anything:
#
#     benchmarks/with_links.sh python3 -m pytest -m gpu
#     benchmarks/with_links.sh python3 benchmarks/grouped_mlp.py --rounds 50
#
# For machines where nothing can be installed; the dependencies must be importable.  It makes a temporary folder of links,
# cute_grouped_mlp -> runtime/ and its sub-packages, puts it first on PYTHONPATH and removes it at the end.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/cute_grouped_mlp"
ln -s "$root"/runtime/* "$root"/{codegen,templates,generated,examples} "$links/cute_grouped_mlp/"
PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH} "$@"
