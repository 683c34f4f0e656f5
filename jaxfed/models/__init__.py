"""Networks of the papers as Equinox modules, and the losses they are trained with."""

from jaxfed.models.autoencoder import Autoencoder as Autoencoder
from jaxfed.models.autoencoder import reconstruction_loss as reconstruction_loss
