"""Operations, the backends that implement them, and the choice between them."""
