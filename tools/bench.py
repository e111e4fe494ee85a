"""Owns `kvring bench`: options and help of the measurements."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure a server: tables, JSON and plots.", rich_markup_mode=None)
