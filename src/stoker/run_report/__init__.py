"""The report page of a run, and the log it is made from. Nothing in it needs torch; plots need matplotlib (`stoker[report]`)."""
