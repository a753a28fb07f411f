"""`fpipe checkpoint`: look at checkpoints on disk, and in memory. No torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fpipe._format import format_bytes
from fpipe.cli.app import CommandError, app, verb
from fpipe.cli.options import Json
from fpipe.cli.output import print_json, progress, show
from fpipe.interop.checkpoints.leftovers import leftovers
from fpipe.interop.checkpoints.manifest import CheckpointError, Manifest, chosen

checkpoint = typer.Typer(help="Checkpoints on disk, and in memory.", no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint")
WORDS = {True: "right", False: "damaged", None: "has no hash"}


@verb("fpipe checkpoint verify checkpoints/000012-step-1200", group=checkpoint)
def verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: the last one.")],
    as_json: Json = False,
) -> None:
    """Compare each file of a checkpoint with its size and SHA-256; status 1 if one differs."""
    try:
        manifest = Manifest.read(chosen(folder))
        with progress(f"hash {folder}", len(manifest.files)) as step:
            states = []
            for name in manifest.files:
                step(name)
                states.append(WORDS[manifest.is_right(name)])
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    rows: list[dict[str, Any]] = [
        {"name": name, "bytes": size, "state": state}
        for (name, size), state in zip(manifest.files.items(), states, strict=True)
    ]
    if as_json:
        print_json({"checkpoint": str(manifest.path), "files": rows})
    else:
        from rich.text import Text

        from fpipe.cli.tables import table

        listing = table(["file", "bytes", "state"], words=["file", "state"])
        for row in rows:
            listing.add_row(Text(row["name"]), f"{row['bytes']}", row["state"])
        show(listing, Text(str(manifest.path)))
    if wrong := [row["name"] for row in rows if row["state"] == WORDS[False]]:
        raise CommandError(f"{manifest.path} is damaged: {', '.join(wrong)} changed since it was saved")


@verb("fpipe checkpoint memory", "fpipe checkpoint memory checkpoints --clear", group=checkpoint)
def memory(
    folder: Annotated[Path | None, typer.Argument(help="Checkpoints on disk: only those that belong to them.")] = None,
    shared: Annotated[Path, typer.Option(help="The folder of shared memory.")] = Path("/dev/shm"),
    clear: Annotated[bool, typer.Option("--clear", help="Remove those that no living process has.")] = False,
    as_json: Json = False,
) -> None:
    """List the memory checkpoints on this host, of this user, or of all users for root.

    A job that torchrun is starting again has no process for some seconds: --clear then makes it go on from disk.
    """
    rows: list[dict[str, Any]] = []
    for each in leftovers(shared, folder):
        state = "in use" if each.processes else "removed" if clear and each.remove() else "left"
        rows.append({**vars(each), "folder": str(each.folder), "state": state})
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"no memory checkpoints in {shared}{f' of {folder}' if folder else ''}")
        return
    from rich.text import Text

    from fpipe.cli.tables import table

    columns = ["user", "job", "step", "bytes", "state", "processes", "checkpoints", "folder"]
    listing = table(columns, words=[name for name in columns if name not in ("step", "bytes")])
    for row in rows:
        values = row | {"bytes": format_bytes(row["bytes"]), "processes": ", ".join(map(str, row["processes"]))}
        listing.add_row(*(Text("" if values[name] is None else str(values[name])) for name in columns))
    show(listing, Text(f"memory checkpoints in {shared}"))
