"""Chat templates: render messages as text for a model, as `transformers` does."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from jaxgrow.untrusted import UntrustedError
from train.common.errors import UserError
from train.extras.bounded import child
from train.extras.tokenizers.special import Special


def render_chat(special: Special, messages: Sequence[Mapping[str, str]]) -> str:
    """Render a chat as text, up to the point where the model answers.

    The template comes with the model, so another process runs it, with limits of time and memory.

    Args:
      special: the special tokens of the model and its chat template.
      messages: the messages, each with a ``role``, such as "user", and ``content``.

    Raises:
      UserError: the model has no chat template, the template fails, refuses the messages or exceeds
        the limits, or jinja2 is not installed.
    """
    if special.template is None:
        raise UserError(
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); leave out --chat"
        )
    if find_spec("jinja2") is None:
        raise UserError("chat templates need jinja2: pip install jinja2")
    request = {"template": special.template, "messages": list(messages), "names": special.names}
    try:
        return child.ask("the chat template of the model failed", job="render", **request)[0]
    except UntrustedError as error:
        raise UserError(str(error)) from error
