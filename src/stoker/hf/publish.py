"""The hub as a place for models. Out of reach, it is one sentence: an error before training, a warning after it."""

from __future__ import annotations

import logging
from pathlib import Path

import transformers

from stoker.errors import UserError, first_line

__all__ = ["PublishingTrainer"]

log = logging.getLogger("stoker")


class PublishingTrainer(transformers.Trainer):  # type: ignore[misc]
    """The part of the Trainer that talks to the hub, for `push_to_hub=True`."""

    hub_model_id: str | None

    def init_hf_repo(self, token: str | None = None) -> None:
        try:
            super().init_hf_repo(token=token)
        except Exception as error:  # whatever the hub's library and the network below it raise
            name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
            raise UserError(
                f"--push_to_hub: the repository {name!r} cannot be made on the hub: {first_line(error)}; "
                "log in by `hf auth login`, or leave the option out: the model is saved here in any case"
            ) from None

    def publish(self, message: str) -> None:
        """Sends the output folder as it is; a hub that cannot be reached costs a sentence, never the model."""
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
                "the model was not pushed to the hub: %s; it is in %s, and `hf upload %s %s` sends it",
                first_line(error), self.args.output_dir, self.hub_model_id, self.args.output_dir,
            )  # fmt: skip
