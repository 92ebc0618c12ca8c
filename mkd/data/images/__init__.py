"""Images of conversations: from records to the pixels that a model's first stage takes.

image_files.py          the bytes of an image: a path below --image-root, a data URI or a struct
image_decoding.py       image bytes checked, turned upright and decoded to RGB
processors.py           a model's image processor: tokens and patches of a size, patches of an image
conversation.py         conversations with images to ids, loss mask and places of the images
image_table.py          the images of a tokenised corpus on disk, and those of a pack
image_packing.py        the tokens to keep of documents with images, and the room that images take
row_images.py           the images of a micro-batch on one rank, with their positions
"""
