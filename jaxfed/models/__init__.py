"""The papers' networks as Equinox modules, and the losses that train them."""

from jaxfed import _names
from jaxfed.models.autoencoder import Autoencoder as Autoencoder
from jaxfed.models.autoencoder import reconstruction_loss as reconstruction_loss
from jaxfed.models.convolutional import ConvolutionalAutoencoder as ConvolutionalAutoencoder
from jaxfed.models.diffusion import Corruption as Corruption
from jaxfed.models.diffusion import DenoisingLoss as DenoisingLoss
from jaxfed.models.diffusion import denoiser as denoiser
from jaxfed.models.diffusion import generate as generate
from jaxfed.models.diffusion import interpolation as interpolation
from jaxfed.models.diffusion import variance_preserving as variance_preserving
from jaxfed.models.inception import inception_features as inception_features
from jaxfed.models.perceptron import Perceptron as Perceptron
from jaxfed.models.unet import UNet as UNet

__dir__ = _names.public_names(__name__)
