"""The curves in event files, as TensorBoard loads them."""

from collections import defaultdict

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader


def scalars(logdir, run):
    """name -> {step: value} of a run, and the steps in the order in which they were written."""
    found = defaultdict(dict)
    for file in sorted((logdir / run).iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag][event.step] = value.tensor.float_val[0]
    return dict(found)
