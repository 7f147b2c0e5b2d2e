"""``nvfp4 completion``: how a shell completes commands, options and paths."""

import click

COMPLETION = {
    "bash": 'eval "$(_NVFP4_COMPLETE=bash_source nvfp4)"  # at the end of ~/.bashrc',
    "zsh": 'eval "$(_NVFP4_COMPLETE=zsh_source nvfp4)"  # at the end of ~/.zshrc',
    "fish": "_NVFP4_COMPLETE=fish_source nvfp4 | source  # in ~/.config/fish/completions/nvfp4.fish",
}


@click.command(short_help="Set up completion in bash, zsh or fish.")
@click.argument("shell", type=click.Choice(sorted(COMPLETION)))
def completion(shell: str) -> None:
    """Print the line that makes SHELL complete nvfp4's commands, options and paths, and where to put it."""
    click.echo(COMPLETION[shell])
