#!/bin/bash
# On each of two machines: HEAD=node0 bash torchrun.sh
#
# The agents meet at HEAD:29500. If a process ends with an error all are started again, three times at most, and the run goes on
# from its last checkpoint; within five minutes both machines have to be there.
OMP_NUM_THREADS=1 torchrun \
  --nnodes 2 \
  --nproc-per-node "${RANKS_HERE:-8}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${HEAD:?the first machine}:29500" \
  --rdzv-conf join_timeout=300 \
  --max-restarts 3 \
  -m vescale_fn.recipes.train --mesh "${MESH:-dp=4,tp=4}" --checkpoints "${CHECKPOINTS:-run}" --resume "$@"
