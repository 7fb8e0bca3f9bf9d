"""The page about a run, and the log it is made from. Nothing here needs torch; plots need matplotlib (`stoker[report]`)."""
