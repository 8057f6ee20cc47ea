"""Networks as chains of blocks, models of users and torchvision, weights, and cuts into stages.

Nothing here communicates. Arguments of a network that follow from the data: `in_channels` of an
image, its height and width `image_size` in pixels, the number of logits `num_classes`; of tokens
`vocabulary` and `context`; `input_shape` of a sample. `init_std` is the standard deviation of the
initial weights; None keeps the default initialisation.
"""
