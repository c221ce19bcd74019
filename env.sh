. /tmp/venv/bin/activate
export PYTHONPATH=$(ls -d /tmp/wd/packages/*/src /tmp/wd/apps/* | tr '\n' ':')
export OMP_NUM_THREADS=1
