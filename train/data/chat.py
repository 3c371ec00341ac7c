"""Chat templates: render messages as text for a model, as `transformers` does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from train.common.errors import UserError
from train.data.special import Special


def rendered(special: Special, messages: Sequence[Mapping[str, str]]) -> str:
    """Render a chat as text, up to the point where the model answers.

    Args:
      special: the special tokens of the model and its chat template.
      messages: the messages, each with a ``role``, such as "user", and ``content``.

    Raises:
      UserError: the model has no chat template, the template refuses the messages, or jinja2 is not
        installed.
    """
    if special.template is None:
        raise UserError(
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); leave out --chat"
        )
    environment = _environment()
    from jinja2 import TemplateError  # pyright: ignore[reportMissingImports]

    try:
        template = environment.from_string(special.template)
        return template.render(messages=messages, add_generation_prompt=True, **special.names)
    except TemplateError as error:
        raise UserError(f"the chat template of the model failed: {error}") from error


def _environment() -> Any:
    try:
        from jinja2 import TemplateError, nodes  # pyright: ignore[reportMissingImports]
        from jinja2.ext import Extension, loopcontrols  # pyright: ignore[reportMissingImports]
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("chat templates need jinja2: pip install jinja2") from error

    class Generation(Extension):
        """The tag ``{% generation %}``, which marks the answers of a chat without changing them."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
    ) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
