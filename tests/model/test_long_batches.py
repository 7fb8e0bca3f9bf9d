"""A packed batch may be longer than the longest sequence that a model allows; it must not be treated as one sequence."""

from __future__ import annotations

import pytest
import torch
import transformers

import stoker

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra", "Albert"])
def test_more_tokens_in_a_batch_than_positions_in_the_model(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(max_position_embeddings=24, pad_token_id=0, **SIZES)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids = torch.randint(1, 99, (6, 20))
    mask = (torch.arange(20) < torch.tensor([20, 3, 17, 9, 20, 12])[:, None]).long()
    with torch.no_grad():
        expected = model(input_ids=ids * mask, attention_mask=mask).last_hidden_state
        found = stoker.optimize(model, dtype=torch.float32)(input_ids=ids * mask, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
