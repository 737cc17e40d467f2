"""Forward passes: transformers' own, and faster ones that have to compute the same.

`policy.py` chooses among them, and `forward_check` compares them with the model's own. Nothing else
in the package knows which one is used.

row_forward         what sampling asks of a forward pass, and the model's own with cached rows
plain_forward       the model's own with left padding, for models that nothing else computes
attention           masks and kernels for packed rows and for rows that share prefixes
gated_mlp, products  parts of layers that cost less on a CPU
logprobs, logit_transform        logprobs of chosen tokens without a matrix of all logits
architecture_check  what no forward pass computes
"""
