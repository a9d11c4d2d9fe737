"""Operations of other libraries with the signatures of ours. Nothing here is imported unless a backend asks for it."""
