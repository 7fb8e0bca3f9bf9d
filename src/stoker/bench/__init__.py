"""`stoker bench`: stock transformers against Stoker on this machine, without a checkout and without a network.

Scripts in benchmarks/ measure in more detail, with the same steps (`sides`, `trainer_step`, `encoder_step`, `decoder_step`,
`narrow`, `collectives`). Modules here import torch and the rest of Stoker when they measure, and not before: a script may choose
another version of Stoker in between (`benchmarks/train_step.py --before`).
"""
