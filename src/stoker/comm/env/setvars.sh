# For old scripts that source the setvars.sh of oneccl_bindings_for_pytorch; Stoker itself needs none of it.
#   source "$(python -c 'from stoker.comm import cwd; print(cwd)')/env/setvars.sh"
for stoker_python in "${VIRTUAL_ENV:-/nonexistent}/bin/python" python python3; do
  if command -v "$stoker_python" >/dev/null 2>&1 && "$stoker_python" -c 'import stoker' >/dev/null 2>&1; then
    eval "$("$stoker_python" -c 'from stoker.cli.env import main; main([])')"
    break
  fi
done
unset stoker_python
