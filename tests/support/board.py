"""TensorBoard on a log directory, for as long as a test needs it."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import urlencode

PATIENCE = 60  # seconds that the server, or a run that it is to find, may take


class Board:
    """A server on a free port of the loopback.

    Args:
        fast: whether by the loader in Rust, else by the one in Python.
        port: of the server; 0 for a free one.
    """

    def __init__(self, logdir, fast=True, reload=1, port=0):
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port)]
        command += [
            "--host",
            "127.0.0.1",
            f"--load_fast={'true' if fast else 'false'}",
            "--reload_interval",
            str(reload),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                self.url = found[0]
                return
        raise AssertionError("TensorBoard did not start: " + "".join(said))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.process.stdout.close()

    def get(self, route, **query):
        """(status, media type, body) of one of the plugin's routes, unpacked."""
        url = f"{self.url}data/plugin/fpipe_timeline/{route}" + (f"?{urlencode(query)}" if query else "")
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return answer.status, answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get_content_type(), error.read()

    def json(self, route, **query):
        status, kind, body = self.get(route, **query)
        assert (status, kind) == (200, "application/json"), body
        return json.loads(body)

    def until(self, true):
        """The index, once it is as a test wants it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            index = self.json("index")
            if true(index["captures"]):
                return index
            time.sleep(0.2)
        raise AssertionError(f"the server never listed what was written: {index}")
