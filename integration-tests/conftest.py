"""What the tests across packages share."""

import pytest


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory):
    """A folder with a tiny random model and its tokenizer, as ``save_pretrained`` leaves it."""
    from rl_models.testing import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
