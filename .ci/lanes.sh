# Steps and lanes: a step is a command that must succeed, a lane is a function that runs steps, and lanes run at the same time.
# Sourced after lib.sh by scripts that run many steps; never run. Owns how steps are announced and stopped, not which steps there are.
#
# ACCL_TEST_LANES=1 runs all lanes one after the other.

begin=$SECONDS
lanes=${ACCL_TEST_LANES:-2}
logs=$(mktemp -d)
pids=()
# Each lane is a process group, so that stopping a lane also stops its current step.
stop_lanes() {
  [ ${#pids[@]} -eq 0 ] || kill -- "${pids[@]/#/-}" 2>/dev/null || true
  rm -rf "$logs"
}
trap stop_lanes EXIT
trap 'exit 130' INT TERM
set -m

# Runs one step. Outside of lanes its output appears as it is written, in a lane when the step has ended: two lanes would mix their lines.
step() {
  local start=$SECONDS log
  if [ -z "${in_lane:-}" ]; then
    echo "== $*"
    "$@" || step_failed "$@"
    echo "== $1: ok, $((SECONDS - start)) s"
    return
  fi
  log=$logs/$BASHPID
  echo "== begins: $*"
  if "$@" >"$log" 2>&1; then
    { flock 9; echo "== $*"; cat "$log"; echo "== $*: ok, $((SECONDS - start)) s"; } 9>"$logs/lock"
  else
    { flock 9; echo "== $*"; cat "$log"; step_failed "$@"; } 9>"$logs/lock"
  fi
}

step_failed() {
  echo "FAILED: $* (after $((SECONDS - begin)) s)" >&2
  exit 1
}

# Runs the functions that are its arguments, at the same time. The first that fails stops the others and the script.
run_lanes() {
  local lane ended pid left
  if [ "$lanes" = 1 ]; then
    for lane in "$@"; do "$lane"; done
    return
  fi
  for lane in "$@"; do
    { in_lane=1; "$lane"; } </dev/null &
    pids+=($!)
  done
  while [ ${#pids[@]} -gt 0 ]; do
    wait -n -p ended "${pids[@]}" || exit 1
    left=()
    for pid in "${pids[@]}"; do [ "$pid" = "$ended" ] || left+=("$pid"); done
    pids=("${left[@]}")
  done
}
