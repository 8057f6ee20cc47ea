"""The choices that an ejected file has folded in, and the constants at its top.

The values here are examples, with which the files of this folder are a program, too: `python
train.py` in it. The line of a constant, with its comment, is in an ejected file if its code still
reads the constant.
"""

# Choices: of a condition that reads nothing else, an ejected file has the branch that is taken.
STRATEGY = "single"
TASK = "classification"
INPUTS = "images"
DEVICE = "auto"
SCHEDULE = "cosine"
OPTIMIZER = "one group"
EVALUATE_TEST = "every_epoch"
MATMUL = "highest"
HAS_BUFFERS = False
DRAWS_BY_BLOCK = False
BLOCKS_RESET = False
MODEL_MAY_DRAW = False
ENDS_WITHIN_EPOCH = False
HAS_UNITS = False

# Constants
SEED = 0
EPOCHS = 20
MAX_STEPS = 1000  # after which the run ends
BATCH_SIZE = 64  # samples of a global batch, over all ranks
ACCUMULATE = 1  # micro-batches of a local batch
LR = 0.1
WARMUP_STEPS = 0
MILESTONES = [10, 15]  # epochs
GAMMA = 0.1  # factor of the learning rate at each milestone
DECAY = 0.2  # part of the run in which the learning rate falls
MAX_GRAD_NORM = None  # of all parameters together
LABEL_SMOOTHING = 0.0
ROOT = "data"  # directory of the dataset, or the file of a text
VAL_FRACTION = 0.0  # of the training samples, which are held out
VAL_SEED = 0
CROP_PADDING = 0  # pixels of zeros around an image, before a crop of its size
FLIP = False
MEAN = [0.305]  # of each channel of images in [0, 1]
STD = [0.324]
TRAIN_SIZE = 10000
TEST_SIZE = 1000
IN_CHANNELS = 1
IMAGE_SIZE = 28
NUM_CLASSES = 10
VOCABULARY = 256
CONTEXT = 256  # tokens of a sample
DEPTH = 4  # blocks
WIDTH = 64  # numbers of a token
HEADS = 4
HIDDEN = 256  # units between the two linear layers of a block
PATCH_SIZE = 7  # pixels
POOL = "mean"
TIED = False
INIT_STD = None  # of the initial weights of convolutions and linear layers
RESHARD = True  # free a block's gathered parameters between its forward and its backward pass
BUCKET_MB = 25  # MiB of gradients that are sent together
UNITS = ["conv1"]  # modules whose parameters are gathered together
WEIGHTS = "train_plain.pt"  # file of the trained weights
