"""A module as it is, in stages: exported, cut, and written out as pure functions."""
