"""What the tests across packages share."""

import pytest


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory):
    """A folder with a tiny random model and its tokenizer, as ``save_pretrained`` leaves it."""
    from rl_models.testing import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
