# Shared by the scripts here: where things are, how keys are made, how a step is announced. Sourced, never run.
# Own: names and paths. Not here: any step itself; one script per tool.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
TORCH=${TORCH:-2.15.0}
PYTHON=${PYTHON:-python3}
VENV=${VENV:-$ROOT/.venv}
# What we build for, oldest first; CI runs the default, and a part of the tests with one of the others in turn.
TORCHES=(2.13.0 2.14.1 2.15.0)
# Accepts 2.15 as well as 2.15.0; a wheel serves one minor.
TORCH_MINOR=$(cut -d. -f1,2 <<<"$TORCH")
export TORCH PYTHON VENV
# Python writes as it does for users, whoever calls: what is buffered behaves otherwise in a pipe.
unset PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE
# Cargo and maturin ask the first python on the path, and pyo3 this one, for torch and for CPython's headers.
if [ -x "$VENV/bin/python" ]; then
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH PYO3_PYTHON=$VENV/bin/python
fi

die() {
  echo "error: $*" >&2
  exit 1
}

# The virtual environment that is a torch's own: the default one has .venv, which so stays as it is.
venv_of() {
  case $1 in
  2.15 | 2.15.*) echo "$ROOT/.venv" ;;
  *) echo "$ROOT/.make/venv-$1" ;;
  esac
}

# Whether there is a libclang, with which the bindings to MPI read its header.
has_libclang() {
  local pattern
  [ -z "${LIBCLANG_PATH:-}" ] || return 0
  # Not libclang-cpp, which is another library.
  for pattern in '/usr/lib*/libclang' '/usr/lib/*/libclang' '/usr/lib/llvm*/lib/libclang'; do
    compgen -G "$pattern.so*" >/dev/null || compgen -G "$pattern-[0-9]*.so*" >/dev/null && return 0
  done
  return 1
}

# One line per key, hashed: `key a b c` names a state; equal keys mean that nothing has to be done.
key() {
  printf '%s\n' "$@" | sha256sum | cut -d' ' -f1
}

# Hash of the contents and names of all files below the given paths, leaving out what builds, Python and editors drop there.
tree_hash() {
  find "$@" -type f -not -path '*/__pycache__/*' -not -name '*.so' -not -name '*~' -print0 | LC_ALL=C sort -z |
    xargs -0 -r sha256sum | sha256sum | cut -d' ' -f1
}

# Whether `file` holds the key.
fresh() {
  [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}
