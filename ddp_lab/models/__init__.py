"""Networks as chains of blocks, models of users and of torchvision, weights, and the cut of a chain into stages.

torch.distributed is not used here. Of the arguments of a network, three follow from the data: `in_channels` of an image, its
height and width `image_size` in pixels, and the number of logits, `num_classes`. `init_std` is the standard deviation of the
initial weights; None keeps the default initialisation.
"""
