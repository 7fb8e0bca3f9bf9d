"""Publishing to the Hugging Face Hub. If it cannot be reached: an error before training, a warning after it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import transformers

from stoker.errors import UserError, first_line

__all__ = ["PublishingTrainer"]

log = logging.getLogger("stoker")


class PublishingTrainer(transformers.Trainer):  # type: ignore[misc]
    """The part of the Trainer that implements `push_to_hub=True`."""

    hub_model_id: str | None

    def init_hf_repo(self, token: str | None = None, **named: Any) -> None:
        try:
            super().init_hf_repo(token=token, **named)
        except Exception as error:  # the hub's library and the network may raise anything
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            raise UserError(
                f"--push_to_hub: the repository {name!r} cannot be created on the hub: {first_line(error)}; "
                "log in with `hf auth login`, or leave the option out: the model is saved locally in any case"
            ) from None

    def publish(self, message: str) -> None:
        """Uploads the output folder; if that fails, logs a warning."""
        if not self.args.push_to_hub or not self.is_world_process_zero():
            return
        from huggingface_hub import HfApi

        self._finish_current_push()
        try:
            if not (Path(self.args.output_dir) / "README.md").exists():
                self.create_model_card()
            HfApi().upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=self.args.output_dir,
                commit_message=message,
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                ignore_patterns=["_*", ".*", "*.old", "checkpoint-*", "training_args.bin"],
            )
        except Exception as error:  # as above
            log.warning(
                "the model was not pushed to the hub: %s; it is in %s; upload it with `hf upload %s %s`",
                first_line(error), self.args.output_dir, self.hub_model_id, self.args.output_dir,
            )  # fmt: skip
