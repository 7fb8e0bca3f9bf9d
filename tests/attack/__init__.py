"""Bad input, kills and unusual environments, drawn from a seed. pytest runs a few cases, `make attack` thousands.

`case.py` defines a case and what counts as a failure, `server.py` runs cases in forks of a process that has imported
everything, `kinds.py` lists the generators, and `run.py` is the program behind `make attack`.
"""
