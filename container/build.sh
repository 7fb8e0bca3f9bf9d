#!/bin/sh
# The first stage: /opt/stoker, a virtual environment with torch, Stoker and the compiled ccl backend, from the sources in /src.
# The compiler stays behind in this stage.
set -eu
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates g++ python3-dev python3-venv

python3 -m venv /opt/stoker
# From PyTorch's own index: the default one has the CUDA build, several times as large.
/opt/stoker/bin/pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} 'torch>=2.13.0,<3'
/opt/stoker/bin/pip freeze | sed -n 's/^\(torch==[0-9.]*\).*/\1/p' >/tmp/constraints.txt
/opt/stoker/bin/pip install -q -c /tmp/constraints.txt "/src[${EXTRAS:-hf,sft,report,ccl}]"
/opt/stoker/bin/python -m stoker.comm.compiled

# What only a compiler or a tuner of MPI reads. Wheels have no symbolic links, so a library of MPI lies there once per name.
cd /opt/stoker
find . -name '*.a' -delete
rm -rf opt/mpi/tune_fast
for copy in lib/*.so lib/*.so.*; do
  for longer in "$copy".*; do
    if [ -f "$longer" ] && [ ! -L "$longer" ] && cmp -s "$copy" "$longer"; then
      ln -sf "$(basename "$longer")" "$copy"
      break
    fi
  done
done
find . -name __pycache__ -type d -prune -exec rm -rf {} +
rm -rf lib/python3*/site-packages/torch/include lib/python3*/site-packages/torch/share
