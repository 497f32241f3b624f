# Shared by the scripts here: locations, keys and helpers. Sourced, never run. Owns names and paths. Steps are not here:
# each tool has its own script.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
TORCH=${TORCH:-2.15.0}
PYTHON=${PYTHON:-python3}
VENV=${VENV:-$ROOT/.venv}
# The torch versions that are supported, oldest first. CI runs the default, and part of the tests with one of the others
# in turn.
TORCHES=(2.13.0 2.14.1 2.15.0)
# TORCH may be 2.15 or 2.15.0; a wheel serves one minor.
TORCH_MINOR=$(cut -d. -f1,2 <<<"$TORCH")
export TORCH PYTHON VENV
# Python buffers output and writes bytecode as it does for users, whatever the caller's settings: buffered output
# behaves differently in a pipe.
unset PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE
# Cargo and maturin ask the first python on the path, and pyo3 asks PYO3_PYTHON, for torch and for CPython's headers.
if [ -x "$VENV/bin/python" ]; then
  export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH PYO3_PYTHON=$VENV/bin/python
fi

die() {
  echo "error: $*" >&2
  exit 1
}

# Prints the virtual environment for a version of torch: .venv for the default one, a separate one for others, so that
# .venv does not change.
venv_of() {
  case $1 in
  2.15 | 2.15.*) echo "$ROOT/.venv" ;;
  *) echo "$ROOT/.make/venv-$1" ;;
  esac
}

# Whether libclang exists, with which the bindings to MPI read its header.
has_libclang() {
  local pattern
  [ -z "${LIBCLANG_PATH:-}" ] || return 0
  # These patterns do not match libclang-cpp, which is another library.
  for pattern in '/usr/lib*/libclang' '/usr/lib/*/libclang' '/usr/lib/llvm*/lib/libclang'; do
    compgen -G "$pattern.so*" >/dev/null || compgen -G "$pattern-[0-9]*.so*" >/dev/null && return 0
  done
  return 1
}

# Prints a hash of its arguments, which name a state: if the key is unchanged, nothing has to be done.
key() {
  printf '%s\n' "$@" | sha256sum | cut -d' ' -f1
}

# Prints a hash of the contents and names of all files below the given paths, without files of builds, Python and
# editors.
tree_hash() {
  find "$@" -type f -not -path '*/__pycache__/*' -not -name '*.so' -not -name '*~' -print0 | LC_ALL=C sort -z |
    xargs -0 -r sha256sum | sha256sum | cut -d' ' -f1
}

# Whether file $1 holds the key $2.
fresh() {
  [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}
