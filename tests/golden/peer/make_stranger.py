# Usage: make_stranger.py, with Hugging Face transformers. Writes the folder stranger/ beside itself: a
# small Llama with our small vocabulary of golden/tokenizers/llama2, as a user gets one from a hub.
import os
import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM

here = os.path.dirname(os.path.abspath(__file__))
folder = os.path.join(here, "stranger")
torch.manual_seed(7)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=640, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    initializer_range=0.3, torch_dtype=torch.bfloat16))
model.to(torch.bfloat16).save_pretrained(folder)
shutil.copy(os.path.join(here, "..", "tokenizers", "llama2", "tokenizer.json"), folder)
