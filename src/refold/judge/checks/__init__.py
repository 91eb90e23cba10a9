"""The checks of a trial, one function each, in files by what they look for. `refold.judge.trial` has their order."""
