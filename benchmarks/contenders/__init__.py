"""Trainings of one network on one set of images, by ourselves and by others, as programs.

Each is started once a rank with torch's variables (RANK, WORLD_SIZE, ...), and serves: every line
on its standard input is a request to train, which it answers with the seconds that training took.
"""
