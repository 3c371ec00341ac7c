"""Generate shell completion for the command ``jaxgrow`` from its argument parser."""

import argparse
from collections.abc import Mapping

from jaxgrow.cli.arguments import jaxgrow_parser

_SCRIPT = """\
_jaxgrow() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=
  case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
    "1 "*) words="{commands}" ;;
{values}
    *) case "${{COMP_WORDS[1]}} $word" in
{options}
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jaxgrow jaxgrow
"""
# With these lines, zsh runs completion scripts written for bash.
_ZSH = "autoload -U +X compinit bashcompinit\ncompinit\nbashcompinit\n"


def completion_script(commands: Mapping[str, argparse.ArgumentParser], shell: str) -> str:
    """Generate a completion script for the startup file of a shell.

    Where the script has no candidates, the shell completes file names.

    Args:
      commands: the parser of each subcommand, by name.
      shell: ``"bash"`` or ``"zsh"``.

    Returns:
      The text of the script.
    """
    values = []
    options = []
    for name, parser in commands.items():
        named = [action for action in parser._actions if action.option_strings]
        for action in parser._actions:
            if action.choices is not None:
                words = " ".join(map(str, action.choices))
                before = (action.option_strings or [name])[-1]
                values.append(f'    *" {name} {before}") words="{words}" ;;')
        every = " ".join(action.option_strings[-1] for action in named)
        options.append(f'      "{name} -"*) words="{every}" ;;')
    filled = _SCRIPT.format(
        commands=" ".join(commands), values="\n".join(values), options="\n".join(options)
    )
    return (_ZSH if shell == "zsh" else "") + filled


def run_completion(a: argparse.Namespace) -> None:
    """Print the completion script."""
    print(completion_script(jaxgrow_parser().get_default("commands"), a.shell), end="")
