"""Bad input, kills and odd environments, drawn from a seed. `make attack` runs the long form, pytest a short one each day.

`case.py` says what a case is and when it counts as failed, `server.py` runs cases in forks of a process that has imported
everything, `kinds.py` lists what is drawn, `run.py` is the long form.
"""
