# An image in which ddp_lab is installed, which scripts/kubernetes/runtime.yaml names:
#
#   docker build --tag ddp-lab:latest .
#
# The versions are those of constraints.txt. PyTorch's wheel contains CUDA, so the base image needs
# none. It is not the slim one, because torch.compile needs a C compiler and Python's headers.
FROM python:3.12
WORKDIR /opt/ddp_lab
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY conf conf
COPY scripts scripts
COPY ddp_lab ddp_lab
RUN pip install --no-cache-dir --constraint constraints.txt . && ddp-lab --version
WORKDIR /workspace
CMD ["ddp-lab", "--help"]
