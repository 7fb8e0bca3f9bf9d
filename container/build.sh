#!/bin/sh
# The first stage: /opt/stoker, a virtual environment with torch, Stoker and the compiled ccl backend, from the sources in /src.
# The compiler stays behind in this stage.
set -eu
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates g++ python3-dev python3-venv

python3 -m venv /opt/stoker
# From PyTorch's own index: the default one has the CUDA build, several times as large.
/opt/stoker/bin/pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"
# With the versions that the tests passed with; torch stays the one installed above.
/opt/stoker/bin/pip freeze | sed -n 's/^\(torch==[0-9.]*\).*/\1/p' | cat - /src/constraints.txt >/tmp/constraints.txt
/opt/stoker/bin/pip install -q -c /tmp/constraints.txt "/src[${EXTRAS:-hf,sft,report,ccl}]"
/opt/stoker/bin/python -m stoker.comm.compiled

# What only a compiler, a tuner of MPI or a developer of these libraries reads.
cd /opt/stoker
site=$(echo lib/python3*/site-packages)
find . -name '*.a' -delete
find . -depth -type d \( -name __pycache__ -o -path '*/site-packages/*/tests' \) -exec rm -rf {} +
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
rm -rf opt/mpi/tune_fast bin/IMB-* "$site/torch/include" "$site/torch/share" "$site/torch/test" "$site/pyarrow/include"
# Stoker uses oneCCL's build without SYCL, lib/ccl/cpu/lib. The others are parts of MPI for GPUs, Fortran and programs of its new ABI.
rm -f lib/libccl.so* lib/libmpcp* lib/libmpifort* lib/libmpi_abi*
# Wheels have no symbolic links, so a library of MPI or oneCCL is there once per name.
for copy in lib/*.so lib/*.so.* lib/ccl/cpu/lib/*.so lib/ccl/cpu/lib/*.so.*; do
  for longer in "$copy".*; do
    if [ -f "$longer" ] && [ ! -L "$longer" ] && cmp -s "$copy" "$longer"; then
      ln -sf "$(basename "$longer")" "$copy"
      break
    fi
  done
done
# Byte code of what Stoker imports, because the image's user cannot write it. That of all packages would take 0.3 GB.
# EXTRAS decides which of these packages there are.
for import in 'stoker.hf, torch._dynamo, torch.distributed, transformers.trainer, transformers.pipelines' \
  'transformers.models.auto, transformers.models.bert.modeling_bert, transformers.models.llama.modeling_llama' \
  'datasets' 'peft' 'trl, trl.trainer.sft_trainer' 'sentence_transformers' 'matplotlib.pyplot, stoker.run_report.page' \
  'stoker.tasks.qa.fine_tune' 'stoker.tasks.sft.fine_tune'; do
  bin/python -c "
try:
    import $import
except ModuleNotFoundError as error:
    if '.' in (error.name or ''):  # a part of a package, which was removed above by mistake
        raise
    print('not in these extras:', error.name)"
done
