// A source without torch: quick to compile, and where tests plant what a library must not have.
int plain() { return 3; }
