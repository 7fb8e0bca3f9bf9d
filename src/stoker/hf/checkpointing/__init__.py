"""Checkpoints that survive a kill, and exact resume.

folders (complete or absent), manifest (checksums), lock (one run per folder), run_facts (what must be the same to resume
exactly), same_run (what must be the same to resume at all), random_state, choice and restart (which checkpoint to resume from),
pending_evaluation, interrupts (signals), command (how to resume, for the user), checkpointing_trainer (the part of the Trainer
that uses all of these).
"""
