"""The policies under which everything that differentiates is tested, by name."""

from fpipe import policies

POLICIES = {
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "cheap": policies.cheap,
    "names": policies.save_only("h", "mixed"),  # which some stages of tests/support give to values
}
